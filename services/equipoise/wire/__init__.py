"""Conversion between protobuf and planning's types, with the checks of what others send.

Both sides of the WorkerLink use the values of `messages`; `convert` turns them into protobuf and
back. Must not decide anything.
"""
