"""OpenAI's API: request bodies become engine requests, and engine events become answers."""
