"""Values that the tests of all client libraries share."""

MODEL = "llama_tiny"
KEY = "sk-none"
QUESTION = "What is the capital of France?"
CITIES = ("Paris", "Rome")
SCHEMA = {
    "title": "Place", "description": "A place.", "type": "object",
    "properties": {"city": {"enum": list(CITIES), "type": "string"}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
