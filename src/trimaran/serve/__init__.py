"""The server: OpenAI-compatible HTTP in front of one engine.

Where does a new endpoint go? Its body is a model in `schema/`, its handler a function in
`routes/`, its errors are `ApiError`. Handlers turn a body into token ids and sampling
parameters, hand them to `Service.start`, and write what comes back.
"""
