"""The endpoints ``/v1/responses`` of OpenAI's API, converted to chats and back."""
