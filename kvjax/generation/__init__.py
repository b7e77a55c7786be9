"""Text generation: sampling, the compiled decode loop, prompts and detokenization."""
