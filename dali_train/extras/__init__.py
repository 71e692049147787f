"""What builds on the trainer and is not part of it. Nothing outside imports from here, except the command line."""
