"""Binary units: 1 MiB is 2**20 bytes. Sizes are bytes inside the program and MiB or GiB only when printed."""

KIB = 2**10
MIB = 2**20
GIB = 2**30
