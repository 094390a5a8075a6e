import "weights_of_another.plt"

model {
  weights = pretrained("wrapped.safetensors", rename = ["module.* -> *.*"]) #! E0726
}
