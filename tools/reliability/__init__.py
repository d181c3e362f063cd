"""The sixty checks of reliability and security. Each has a promise, and a test or program that measures a figure."""
