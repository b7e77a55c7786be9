"""Methods as other packages would write them: they import kvjax's public names and types, and nothing else of it."""
