"""The embedded model: its weights, its tokenizer and its LESS checkpoints."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Directory of the embedded model in Hugging Face format."""
