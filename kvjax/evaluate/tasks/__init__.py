"""What models are asked about a context, and how their answers are scored."""
