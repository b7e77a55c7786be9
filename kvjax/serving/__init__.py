"""A server whose memory is constant: rows of one compiled step that requests join and leave."""
