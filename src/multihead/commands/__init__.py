"""The commands that are not in `cli.py`: each file has a group of them, and `register` adds them to the app."""
