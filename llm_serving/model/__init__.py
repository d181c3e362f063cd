"""Describes a model: its sizes, family and number formats, and the parts that several devices hold."""
