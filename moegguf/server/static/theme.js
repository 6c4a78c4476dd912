// Runs before the page is painted, so that the page does not appear in the wrong theme for a moment.
const chosen = localStorage.getItem("moegguf.theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
