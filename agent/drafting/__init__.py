"""The draft model: a small model with the same tokenizer, which guesses the next tokens of the step's sequences.

``Drafter`` follows the steps of the model and makes the drafts. ``DraftNetwork`` loads and runs the draft model.
``DraftRows`` knows the tokens of every batch row, and the keys and values that the draft model has computed.
"""
