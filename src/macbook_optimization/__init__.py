"""Fits training to this machine: hardware, memory, CPU, files and child processes. Independent of TRM."""
