"""Access control: API keys, their rights and quotas, encrypted connections, and the audit log."""
