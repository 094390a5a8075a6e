# Fine-tunes a language model that `save_pretrained` wrote into a folder, on two processes.
param base = "./base"  # the folder: config.json and weights

model {
  network = transformers(base)
  loss    = cross_entropy()
  weights = base  # for another head: pretrained(base, allow_missing = ["score.*"])
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
  optimizer   = adamw(lr = 2e-5, weight_decay = 0.01)
  no_decay    = ["*.bias", "*norm*"]
  lr_schedule = warmup_linear(warmup = 2 steps)
  clip        = 1.0
}

evaluate {
  metrics = [loss, perplexity]
}
