"""One engine over one storage: prompts, turns and tokens through all layers."""
