"""Server-sent events, joined into what a server answers without streaming."""
