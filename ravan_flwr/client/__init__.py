"""Answer the server's messages, in a process for each message or in a warm worker."""
