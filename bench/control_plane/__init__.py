"""What the scheduler costs at 16 to 1,024 instances that report 50 times a second (see `__main__`)."""
