"""kvpress and kvjax side by side on the same model and texts."""
