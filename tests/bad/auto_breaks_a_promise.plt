import "base/gpt.plt"

devices {
  gpus = 4
  kind = a100_80g
}

parallelism {
  zero         = auto #! E0490
  microbatches = auto
}

expect {
  step_time < 1us
}
