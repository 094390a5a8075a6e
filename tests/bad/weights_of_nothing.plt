import "weights_of_another.plt"

model {
  weights = pretrained("wrapped.safetensors", allow_missing = ["*"], allow_unused = ["*"]) #! E0725
}
