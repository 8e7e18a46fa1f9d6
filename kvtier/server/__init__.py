"""What kvtier serves over a socket. Today: metrics and health over HTTP."""
