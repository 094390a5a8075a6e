# Trains an adapter (LoRA) for a language model that `save_pretrained` wrote into a folder, on two processes.
# `dslc export` writes the merged model; with `--adapter`, the adapter alone.
param base = "./base"  # the folder: config.json and weights

model {
  network = transformers(base)
  loss    = cross_entropy()
  weights = base
  adapter = lora(rank = 8, targets = ["q_proj", "v_proj"], alpha = 16)  # a new head: save = "score"
}

data {
  source     = stdlib(context = 64)  # yours: tokens("*.bin"), made by `dslc tokens --tokenizer base/tokenizer.json`
  batch      = 8  # sequences
  validation = 1%
}

devices {
  cpus = 2
}

train {
  steps       = 20
  optimizer   = adamw(lr = 2e-4)
  lr_schedule = warmup_linear(warmup = 2 steps)
  clip        = 1.0
}

evaluate {
  metrics = [loss, perplexity]
}
