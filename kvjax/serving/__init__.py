"""A server with constant memory and continuous batching: requests take and free rows of one compiled step."""
