"""Pictures in the terminal and as figures: what a cache holds, and what each head keeps."""
