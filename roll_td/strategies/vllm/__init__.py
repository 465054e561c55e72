"""`vllm`: an engine of vLLM in processes of its own, owned by one worker.

`strategy` is the worker's side and imports no vLLM; `serving` is it for requests. `process` starts
the engine's process, `__main__`, which something guards, and talks with `engine` in it, the only
importer of vLLM; weights go through `shared`, LoRA adapters through `adapters`.
"""
