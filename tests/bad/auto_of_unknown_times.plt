import "base/gpt.plt"

parallelism {
  tensor = auto #! E0491
}
