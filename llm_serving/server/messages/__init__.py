"""The endpoints ``/v1/messages`` of Anthropic's API, converted to chats and back."""
