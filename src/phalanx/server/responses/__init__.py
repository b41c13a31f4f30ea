"""OpenAI's Responses API: its requests as chats, answers to chats as its responses, and those that are kept."""
