"""A step under a limit that the system keeps."""
