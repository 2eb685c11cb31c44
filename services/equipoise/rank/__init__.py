"""What every rank does, whichever engine runs its model: link, transfer, staging, agreement.

Shared by our worker and by the plugins inside other engines. Read `stager.py` and `header.py`
first.
"""
