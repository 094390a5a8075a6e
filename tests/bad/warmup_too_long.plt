import "base/gpt.plt"

train {
  lr_schedule = warmup_cosine(warmup = 20 steps) #! E0602
}
