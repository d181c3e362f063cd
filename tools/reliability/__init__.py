"""Defines and runs the sixty checks of reliability and security.

A check has two parts: a sentence with the promise, and a test or program that measures whether it holds.
"""
