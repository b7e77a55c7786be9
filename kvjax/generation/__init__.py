"""Text from a model and a cache: drawing tokens, the compiled loop, prompts in and texts out."""
