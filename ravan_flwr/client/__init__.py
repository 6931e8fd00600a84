"""Answer the server's messages, in a process of their own or in a warm worker."""
