// Runs before the first paint, so that a chosen theme never flashes.
const chosen = localStorage.getItem("moegguf.theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
