"""Responses and conversations of the OpenAI API, both durable: any earlier one can be continued, also after a restart.

create.py         POST /v1/responses
making.py         a response: what it continues, the output, what is stored
background.py     a response that is made while nobody waits for it
  registry.py     those that run now
  event_log.py    their events, for readers at any time
  progress.py     what becomes of them, in what is stored
  replay.py       the events of one that has ended, once more
request.py        its body
items.py          items of input and output, and the chat messages that they become
output.py         items of the output as they come, and the events that announce them
errors.py         an error as the last event of a stream
record.py         what is stored beside the tokens
diagnosis.py      why tokens of an earlier response were not reused
routes.py         stored responses: read, stream again, cancel, delete, list the input
conversations.py  conversations and their items
lists.py          pages of items
app.py            the paths
"""
