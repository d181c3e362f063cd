"""The sixty checks of reliability and security: what each promises, and how its figure is found."""
