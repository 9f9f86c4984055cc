"""What programs of many calls are written with, for both clients: see `Client.create_session`."""

from jaxctx.client.templates import Call as Call
from jaxctx.client.templates import Input as Input
from jaxctx.client.templates import Output as Output
from jaxctx.client.templates import Template as Template
from jaxctx.client.templates import semantic as semantic
