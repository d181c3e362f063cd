"""The sixty checks of reliability and security.

Each check has a sentence that states what is checked (the promise), and a test or program that measures a figure.
"""
