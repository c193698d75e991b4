"""The machine and its disks: hardware, memory, folders, installed packages."""
