"""Access control: API keys, their rights and quotas, listening sockets, encrypted connections, and the audit log."""
