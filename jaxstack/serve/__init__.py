"""A server with the OpenAI completions and chat-completions protocol."""
