"""A server with constant memory: requests join and leave the rows of one compiled step."""
