"""OpenAI's chat completions and completions: requests, whole answers and streamed chunks."""
