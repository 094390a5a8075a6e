import "base/digits.plt"

model {
  weights = "wrapped.safetensors" #! E0713
}
