"""Between protobuf and planning's types: the one place that distrusts what others send.

Both sides program against the values of `messages`; `convert` turns them into protobuf and back.
"""
