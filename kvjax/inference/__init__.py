"""Inference engine: runs prompts, turns and decode steps through all layers."""
