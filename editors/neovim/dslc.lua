-- Neovim 0.11 or newer: copy this to ~/.config/nvim/plugin/dslc.lua.
vim.filetype.add({ extension = { plt = "plt" } })

vim.api.nvim_create_autocmd("FileType", {
  pattern = "plt",
  callback = function()
    vim.bo.commentstring = "# %s"
    vim.bo.shiftwidth = 2
    vim.bo.expandtab = true
  end,
})

vim.lsp.config("dslc", { cmd = { "dslc", "lsp" }, filetypes = { "plt" }, root_markers = { ".git" } })
vim.lsp.enable("dslc")
vim.lsp.inlay_hint.enable(true)
