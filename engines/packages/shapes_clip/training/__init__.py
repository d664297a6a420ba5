"""How `shapes-clip` is made and measured. Runs from the repository; the wheel leaves it out."""
